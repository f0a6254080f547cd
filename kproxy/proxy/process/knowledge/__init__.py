"""What live traffic tells of groups and leaders, decoded beside the relays."""
