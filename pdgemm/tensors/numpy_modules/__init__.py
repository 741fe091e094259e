"""The functions of numpy.linalg and numpy.fft for tensors."""
