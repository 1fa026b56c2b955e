"""How scales of fp8 operands are shared; needs no framework."""

# Channels of a token that share a scale.
SCALE_CHANNELS = 128
