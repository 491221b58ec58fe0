"""Everything that crosses a wire, typed. Knows neither HTTP nor torch."""
