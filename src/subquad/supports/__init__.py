"""Supports: who may attend to whom. Each is described once, and everything else is read off the description."""
