"""Find what a model has, put the operators in, say what was done, and take them out again."""

from ops_nn.adopt.adopt import Adoption, Row, adopt

__all__ = ["Adoption", "Row", "adopt"]
