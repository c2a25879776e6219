"""How a token is chosen: what a request asks for, and one choice for target and drafter alike."""
