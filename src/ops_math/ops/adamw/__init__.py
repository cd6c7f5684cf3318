"""A step of AdamW over all parameters of a model, in place."""
