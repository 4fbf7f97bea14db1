//! The median of measured values.

/// Returns the middle one of the values, or the mean of the two in the middle; `None` if there is no value.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => Some((values.get(middle.checked_sub(1)?)? + values[middle]) / 2.0),
        _ => values.get(middle).copied(),
    }
}
