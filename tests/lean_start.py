"""Processes that start TensorFlow in two thirds of the time.

Keras imports scikit-learn, matplotlib and pandas wherever they are installed, and needs none of them to train. For processes
that need none either they are as good as absent.
"""


def lean_path(folder):
    """An entry for PYTHONPATH that makes them absent."""
    path = folder / "lean"
    path.mkdir(parents=True, exist_ok=True)
    for name in ("matplotlib", "pandas", "sklearn"):
        (path / f"{name}.py").write_text('raise ImportError("absent in this test")\n')
    return str(path)
