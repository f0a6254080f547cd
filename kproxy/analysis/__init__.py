"""Questions to the tables: functions from DataFrames to a DataFrame. Refuses to know how answers are displayed."""
