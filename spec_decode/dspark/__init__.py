"""DSpark: the draft network of V4.1, and a round of drafting."""
