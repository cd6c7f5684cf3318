"""Gated linear units: an activation of one input times another, the two given apart or packed in one tensor."""
