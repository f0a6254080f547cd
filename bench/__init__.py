"""What kproxy costs, as ratios to other proxies on the same machine in the same run: `python -m bench`.

`cases` says what is sent, `broker` and `load` are the two ends, `processes` starts what stands between them, `measure`
alternates between the proxies, `report` judges. Ratios hold on any machine; seconds only on the one they came from.
"""
