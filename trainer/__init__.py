"""Everything that runs inside a container: plain Python and TensorFlow, never kfp."""
