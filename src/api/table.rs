//! Values as the rows of tables. The columns of a value stand beside it, in the file that has its type.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::text::clean;

/// A column of a table of `T`: its heading, and the function that returns the cell of a row.
pub type Column<T> = (&'static str, fn(&T) -> String);

/// A table of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The headings of the columns.
    pub heading: Vec<&'static str>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns a table of these columns, with a row for each item.
    pub fn of<T>(columns: &[Column<T>], items: &[T]) -> Self {
        let row = |item: &T| columns.iter().map(|(_, cell)| cell(item)).collect();
        Self {
            heading: columns.iter().map(|(heading, _)| *heading).collect(),
            rows: items.iter().map(row).collect(),
        }
    }
}

/// A value of which lists are shown as tables.
pub trait Listed: DeserializeOwned + 'static {
    /// The columns.
    const COLUMNS: &'static [Column<Self>];
}

/// Parses a list, and returns it as a table.
pub(crate) fn listed<T: Listed>(list: Value) -> serde_json::Result<Table> {
    Ok(Table::of(T::COLUMNS, &serde_json::from_value::<Vec<T>>(list)?))
}

/// Returns a text as a cell of a table; an empty text becomes `-`. Texts come from the network, so characters that could
/// control the terminal are written as codes.
pub fn text(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { clean(text) }
}

/// Returns an optional value as a cell of a table.
pub fn optional(value: Option<&impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| text(&value.to_string()))
}

/// Returns a list as a cell of a table, comma-separated.
pub fn list(all: &[impl ToString]) -> String {
    text(&all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}
