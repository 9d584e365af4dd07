"""Supports: who may attend to whom, as objects that feed the kernel, the checker and the picture."""
