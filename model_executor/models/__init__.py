"""The V4.1 network inside vLLM: shape, checkpoint, and the model class."""
