"""Where a compiled pipeline runs: on this machine, on Kubeflow Pipelines."""
