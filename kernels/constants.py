# Tokens per step of the chunked delta rule: states can be cut, saved and restored at its multiples.
KERNEL_CHUNK = 64
