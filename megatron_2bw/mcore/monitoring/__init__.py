"""When things ran: clocks, timers, the log line and the recorded timeline."""
