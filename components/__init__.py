"""One thin Kubeflow Pipelines component a file; each calls one function of `trainer.tasks`."""
