"""The brokers: how they are found and dialled, which port stands for which, and the rewriting of their addresses."""
