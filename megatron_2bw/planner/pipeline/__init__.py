"""What each stage of a layout holds, and how long a batch of it takes: exact, in closed form or followed."""
