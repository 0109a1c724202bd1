"""Component: files whose content may have changed into a digest. Never cached."""

from kfp import dsl


@dsl.component(base_image="trireme", install_kfp_package=False)
def fingerprint_data(source: str) -> str:
    """Answers with a digest of the source's files, which becomes part of the preparation's cache key."""
    from trainer import tasks

    return tasks.fingerprint_data(source)
