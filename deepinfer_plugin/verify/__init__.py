"""`deepinfer-plugin verify`: proof, on this machine, that the text does not depend on how it is made."""
