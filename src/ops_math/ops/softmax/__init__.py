"""Softmax along one dimension."""
