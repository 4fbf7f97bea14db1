//! Finds the candidate most similar to a misspelt word, by edit distance.

use strsim::osa_distance;

/// The longest word that is compared, in characters; the cost grows with the product of the two lengths.
const WORD_CHARS_MAX: usize = 128;

/// Returns the candidate with the fewest edits from `word`, ignoring case, if the edits are few for the length of `word`.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let folded: String = word.chars().take(WORD_CHARS_MAX + 1).flat_map(char::to_lowercase).collect();
    let length = folded.chars().count();
    if length > WORD_CHARS_MAX {
        return None;
    }
    let allowed = 1 + length / 4;
    candidates
        .into_iter()
        .map(|candidate| (distance(&folded, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= allowed && *distance < candidate.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Counts insertions, deletions, replacements and swaps of neighbours.
fn distance(word: &str, candidate: &str) -> usize {
    let folded = candidate.chars().take(WORD_CHARS_MAX).flat_map(char::to_lowercase).collect::<String>();
    osa_distance(word, &folded)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let keys = ["listen", "listeners", "routes", "bind", "to"];
        assert_eq!(nearest("lisen", keys), Some("listen"));
        assert_eq!(nearest("Listeners", keys), Some("listeners"));
        assert_eq!(nearest("bnid", keys), Some("bind"));
        assert_eq!(nearest("telemetry", keys), None);
        assert_eq!(nearest("x", keys), None);
        assert_eq!(nearest("", keys), None);
        assert_eq!(nearest(&"a".repeat(1 << 20), keys), None);
    }
}
