#!/bin/sh
# By hand, the words are the trainer's: `docker run IMAGE train …`, `docker run IMAGE trainer --help`.
# A program and its arguments, such as the `sh -ec …` of Kubeflow Pipelines, is run as it stands.
# Either takes this process's place, so that signals reach it.
[ "$1" = trainer ] && shift
case $(command -v -- "$1") in
  /*) exec "$@" ;;
esac
exec python -m trainer "$@"
