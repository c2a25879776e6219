"""What V4.1 remembers between steps, as vLLM KV-cache layers, and what a step must know to use it."""
