"""Process management: start worker processes, exchange messages with them, confine them, and end them with everything
they started."""
