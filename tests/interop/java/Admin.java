import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs commands of mqadmin one after the other in one process: a line of standard input each, with
 * tabs between the words. What a command prints stands between two lines that name its number.
 */
public final class Admin {
    private Admin() {
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(
            new InputStreamReader(System.in, StandardCharsets.UTF_8));
        // Errors are part of what a command prints.
        System.setErr(System.out);
        int number = 0;
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            System.out.printf("%n>>> begin %d%n", number);
            MQAdminStartup.main0(line.split("\t"), null);
            System.out.printf("%n>>> end %d%n", number);
            System.out.flush();
            number++;
        }
        System.exit(0);
    }
}
