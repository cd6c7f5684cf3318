"""Dropout whose mask is a function of a key and of the element's place, so that none is stored."""
