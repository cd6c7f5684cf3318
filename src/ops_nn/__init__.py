"""Control of a training run: adopt fused operators in a model, compare runs, and take them back out."""
