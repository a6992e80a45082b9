"""Operations with several implementations, one folder each; nothing here knows the framework."""
