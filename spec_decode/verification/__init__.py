"""Which drafts the target verifies, and what that is expected to cost and to bring."""
