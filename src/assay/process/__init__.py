"""Process management: start processes, exchange messages, confine them, and end them with all their children."""
