"""Layers of models on a mesh, forward and backward: arrays of each rank, and what moves between ranks."""
