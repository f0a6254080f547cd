"""The settings of `kproxy run`: what they are, where they are read from, what can be wrong with them."""
