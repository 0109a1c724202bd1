#!/bin/sh
# By hand, the words are the trainer's: `docker run IMAGE train …`, `docker run IMAGE trainer --help`.
# A program and its arguments, such as the `sh -ec …` of Kubeflow Pipelines, is run as it stands.
# Either takes this process's place, so that signals reach it.
[ "$1" = trainer ] && shift
case $1 in
  */*) exec "$@" ;;
esac
# The shell's own words (`export` is one, and a step) are no programs, so the folders of PATH are looked through.
IFS=:
for folder in $PATH; do
  [ -f "$folder/$1" ] && [ -x "$folder/$1" ] && exec "$@"
done
exec python -m trainer "$@"
