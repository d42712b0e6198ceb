"""Learnt evaluators: labels in, a fitted model, its card and the gate's verdict out."""
