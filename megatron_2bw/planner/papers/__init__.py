"""The planners of the papers: PipeDream-2BW's closed forms, MixPipe's performance model."""
