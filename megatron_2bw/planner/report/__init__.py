"""Plans and estimates as people and programs read them."""
