"""Collective operations as schedules: what each rank sends of a vector, step by step, by several algorithms."""
