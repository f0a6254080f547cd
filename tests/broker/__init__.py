"""A package for pytest, whose fixtures may live as long as the tests of this folder."""
