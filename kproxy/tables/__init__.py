"""Events of sessions as Arrow batches of one schema, and as Parquet files that appear whole or not at all."""
