import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/**
 * Runs commands of {@link Client} side by side in one process, as standard input asks for them.
 *
 * <p>A line is {@code <number>\t<command>\t<name=value>...}, or {@code <number>\trelease} for a
 * command that stays. Everything a command prints bears its number; its last line says whether it
 * was done. The process ends with its input.
 */
public final class Session {
    private static final Map<Integer, Client> RUNNING = new ConcurrentHashMap<>();

    public static void main(String[] args) throws IOException {
        // Results go to the stream that Client has kept by then; libraries print to the other.
        new Client(null, List.of());
        System.setOut(System.err);
        BufferedReader input =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            List<String> words = List.of(line.split("\t"));
            int number = Integer.parseInt(words.get(0));
            if (words.get(1).equals("release")) {
                RUNNING.get(number).release();
                continue;
            }
            Client client = new Client(number, words.subList(2, words.size()));
            RUNNING.put(number, client);
            new Thread(() -> run(client, words.get(1)), line).start();
        }
        System.exit(0);
    }

    private static void run(Client client, String command) {
        Map<String, Object> end = new LinkedHashMap<>();
        try {
            end.put("done", client.run(command));
        } catch (Exception failed) {
            failed.printStackTrace();
            end.put("done", false);
            end.put("failed", String.valueOf(failed));
        }
        client.print(end);
    }
}
