"""The parts of a V4.1 layer. No file here knows what hardware it runs on."""
