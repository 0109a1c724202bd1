"""Component: files that may have changed into a window and a digest. Never cached."""

from kfp import dsl


@dsl.component(base_image="trireme", install_kfp_package=False)
def fingerprint_data(data: str, seed: int, root: str, code: str, run: str, scheduled: str) -> str:
    """Answers with the last day of the window and a digest of the files, which the preparation takes as a parameter."""
    from trainer import tasks

    return tasks.fingerprint_data(data, seed, root, code, run, scheduled)
