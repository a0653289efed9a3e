"""Layouts: one file for each mesh axis, and the engine that folds them into a runner."""
