"""Events of sessions as Arrow batches of one schema, and as Parquet files that appear complete or not at all."""
