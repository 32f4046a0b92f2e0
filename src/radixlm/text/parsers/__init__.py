"""Taking a generated text apart into answer, reasoning and tool calls, while it comes."""
