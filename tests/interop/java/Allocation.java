import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Asks Apache's allocation strategies who owns what, one case per line of standard input.
 *
 * <p>A line is {@code strategy\tme\tclient,client...\ttopic\tbroker:id,broker:id...}, neither list
 * in order; a strategy is a name, with its settings after a colon where it has some. The answer is
 * the places of the own queues in the list as it was given, or {@code refused}.
 */
public final class Allocation {
    public static void main(String[] args) throws IOException {
        PrintStream out = new PrintStream(System.out, false, "UTF-8");
        System.setOut(System.err);
        BufferedReader input =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            out.println(answer(line.split("\t", -1)));
        }
        out.flush();
        System.exit(0);
    }

    private static String answer(String[] asked) {
        List<MessageQueue> given = new ArrayList<>();
        for (String text : words(asked[4])) {
            int colon = text.lastIndexOf(':');
            int id = Integer.parseInt(text.substring(colon + 1));
            given.add(new MessageQueue(asked[3], text.substring(0, colon), id));
        }
        List<MessageQueue> queues = new ArrayList<>(given);
        List<String> clients = new ArrayList<>(words(asked[2]));
        Collections.sort(queues);
        Collections.sort(clients);
        try {
            return strategy(asked[0], given).allocate("group", asked[1], queues, clients).stream()
                .map(queue -> String.valueOf(given.indexOf(queue)))
                .collect(Collectors.joining(","));
        } catch (IllegalArgumentException refused) {
            return "refused";
        }
    }

    private static AllocateMessageQueueStrategy strategy(String text, List<MessageQueue> queues) {
        String[] parts = text.split(":", 2);
        switch (parts[0]) {
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH":
                return new AllocateMessageQueueConsistentHash(Integer.parseInt(parts[1]));
            case "CONFIG":
                AllocateMessageQueueByConfig config = new AllocateMessageQueueByConfig();
                config.setMessageQueueList(words(parts[1]).stream()
                    .map(place -> queues.get(Integer.parseInt(place)))
                    .collect(Collectors.toList()));
                return config;
            case "MACHINE_ROOM":
                AllocateMessageQueueByMachineRoom rooms = new AllocateMessageQueueByMachineRoom();
                rooms.setConsumeridcs(new HashSet<>(words(parts[1])));
                return rooms;
            case "MACHINE_ROOM_NEARBY":
                return new AllocateMachineRoomNearby(strategy(parts[1], queues), new ByPrefix());
            default:
                throw new IllegalStateException(text);
        }
    }

    private static List<String> words(String text) {
        return text.isEmpty() ? Collections.emptyList() : Arrays.asList(text.split(",", -1));
    }

    /** The room is what stands before the first full stop. */
    private static final class ByPrefix implements AllocateMachineRoomNearby.MachineRoomResolver {
        @Override
        public String brokerDeployIn(MessageQueue queue) {
            return consumerDeployIn(queue.getBrokerName());
        }

        @Override
        public String consumerDeployIn(String client) {
            return client.substring(0, Math.max(client.indexOf('.'), 0));
        }
    }
}
