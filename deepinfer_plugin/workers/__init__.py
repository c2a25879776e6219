"""One subclass each of vLLM's workers: which model runner V4.1 gets."""
