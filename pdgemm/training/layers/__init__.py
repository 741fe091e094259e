"""Layers of a model on a mesh: placements of modules, and the exchanges of activations in their forward passes."""
