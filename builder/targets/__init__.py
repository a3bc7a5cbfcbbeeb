"""What the decoder is compiled for, one package per target."""
