"""The questions: each is one SQL text over the tables, for both engines."""
